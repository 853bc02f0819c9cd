"""A fake worker and checks for schedulers: deterministic, torch-free, shipped with the package."""
