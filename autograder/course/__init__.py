"""What an instructor sets, in course.toml and on the command line."""
