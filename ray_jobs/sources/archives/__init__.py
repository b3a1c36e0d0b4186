"""Containers of images and labels, hostile until checked: tar, zip, RAR, HDF5, MATLAB, records."""
