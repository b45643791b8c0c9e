"""Sets of runs: searches over a job's settings, launches that tune themselves, and plans that are run to measure their cost."""
