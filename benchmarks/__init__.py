"""The laboratory beside the package: what zmqtrain is measured by, each figure beside a peer's of the same run.

``python -m benchmarks NAME [--json]`` in a checkout, or ``make bench`` for the common ones. The package never imports this one.
"""
