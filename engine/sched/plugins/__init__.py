"""How policies and resources, which may be plug-ins, are found, called and checked."""
