"""What a user may set: options of the engine and of a request, their checks, and which ones contradict each other."""
