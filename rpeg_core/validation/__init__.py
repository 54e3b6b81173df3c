"""Replaying measured runs through the cost terms (``rpeg validate-model``)."""
