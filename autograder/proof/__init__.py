"""The proof that the criteria are right: submissions that they must and must not catch."""
