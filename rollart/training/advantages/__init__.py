"""Advantage estimators, one a file, and the table that names them."""
