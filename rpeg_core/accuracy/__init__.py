"""How sure predicted times are: intervals from the measured errors of cost terms, and where a plan extrapolates."""
