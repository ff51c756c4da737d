"""Tests across distributions."""
