"""Plug-ins that let other engines ("hosts") verify drafts of a sidecar or of an embedded drafter.

`session` has everything that hosts have in common and imports none of them. Each other module is the plug-in of one
host, and uses only what that host has installed.
"""
