"""Requests in, tokens out."""
