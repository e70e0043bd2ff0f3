"""A model as a recorded program: trace, verify, plan memory, bind to an executor, dump."""
