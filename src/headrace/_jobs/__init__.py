"""What the commands do, as functions: ``headrace.train`` and the like. The command line parses, calls and prints."""
