"""What the parts of the engine pass to each other. These files import nothing of ours but the core."""
