"""Calibration: what a backend measured on a machine becomes a hardware profile, and a run's trace refines it."""

from __future__ import annotations
