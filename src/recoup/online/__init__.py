"""DTR: decide online what to evict, for programs no one can trace. The simulator imports no framework."""
