"""Names that other packages have, for engines that look them up."""
