"""The simulated world: virtual time, modelled hosts and links, faults on a schedule."""
