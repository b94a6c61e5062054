"""The drafters: one interface (`base`), one table of kinds (`registry`), and one file or folder per kind."""
