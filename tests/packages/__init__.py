"""Component packages: found, checked, refused, and kept from doing damage when their hooks fail."""
