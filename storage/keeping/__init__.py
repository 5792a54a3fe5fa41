"""Names, holds and removal of versions, and the check of what is stored."""
