"""Policies in another process or on another machine: a batching server, and an engine that talks to servers."""
