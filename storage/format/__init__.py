"""What stands in a store: paths, records, the commit and its index, and the checks on them."""
