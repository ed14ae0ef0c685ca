"""What ``python -m mkernel doctor`` says of the network. Its other probes compile and import all of CUDA: minutes, when emulated."""

import sys

from mkernel.cli import doctor, probes

doctor.PROBES = tuple(probe for probe in probes.PROBES if probe[0] == "verbs")
assert doctor.PROBES
sys.exit(doctor.main([]))
