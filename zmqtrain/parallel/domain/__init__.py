"""Layers on a strip of the image (Gholami et al. 2018, section 2.4): whole weights, and halos between neighbours."""
