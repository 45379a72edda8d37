"""What runs on the far side of the wall: zygote, supervisor, workers.

Standard library only, nothing from the rest of the product: these modules are loaded by path into a bare
`python3 -I -S`, on the host (zygote) or in any image that has Python (supervisor and workers).
"""
