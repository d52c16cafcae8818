"""The nginx engine: its configuration as text, and the process that runs it."""
