"""``python -m benchmarks.experiments.configurations``."""

from benchmarks.experiments.configurations.sweep import main

if __name__ == "__main__":  # the processes of a sweep import this file again
    main()
