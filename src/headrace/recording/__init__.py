"""Episodes on disk: journal, writers, readers, video."""
