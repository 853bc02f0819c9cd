"""The engine core: the step loop of scheduler and executor, and how its parts are assembled."""
