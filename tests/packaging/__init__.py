"""The five distributions as wheels, in environments that know no source tree."""
