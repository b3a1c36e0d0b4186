"""Untrusted containers of images and labels: tar, zip, RAR, HDF5, MATLAB, records."""
