"""What the core can do without: one concept, one file or folder, and each can be deleted.

The core imports none of this until an option asks for it. An extra imports the core as any user does. Each shows what
it adds by what it subclasses or wraps: begin with `overlap.py` and `cuda/`, the two that such an engine is known for.
"""
