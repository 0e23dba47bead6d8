"""What is asked for: options and their checks, schedules, phases, feedback."""
