"""Reinforcement learning of the shipped model, with rollouts that are generated with and without drafts."""
