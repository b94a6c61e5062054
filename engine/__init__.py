"""An inference engine that verifies drafts: they change its speed, not its outputs."""
