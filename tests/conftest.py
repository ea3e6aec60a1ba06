"""What holds for every test: four CPU devices, of which `cpu:1` to `cpu:3` stand in for
accelerators. They can only be made before JAX first runs."""

import jax

jax.config.update("jax_num_cpu_devices", 4)
