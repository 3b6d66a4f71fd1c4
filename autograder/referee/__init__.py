"""The referee, which judges answers: trusted, in a different process than student code."""
