"""Ray: placement, actors, launch, and the command line. Imports everything below it."""
