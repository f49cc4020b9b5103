"""Tests by package; helpers that several share are imported from here."""
