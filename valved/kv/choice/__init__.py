"""Which columns go, and in which way: chosen when memory is needed, and for a first part of it before."""
