"""A fake worker and checks for schedulers: deterministic and without torch."""
