"""Tests that span distributions."""
