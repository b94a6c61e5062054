"""Advice from a log: replay its requests with the drafters, and predict what drafting gains."""
