"""Drafters that run a network: draft models, MTP, EAGLE and Medusa heads."""
