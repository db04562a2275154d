"""Decoder models and the table of families."""
