"""Objects under a URL: one way to read and write them, whatever the store behind it."""
