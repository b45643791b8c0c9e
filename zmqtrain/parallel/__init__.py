"""Model, batch and domain parallelism inside a compute group (Gholami et al. 2018): layers divided over a Pr x Pc grid."""
