# ruff: noqa: E501 - programs are data
"""What programs of several cases begin with."""

SYSCALL = "import ctypes, os; libc = ctypes.CDLL(None, use_errno=True)\ndef call(*a):\n  r = libc.syscall(*a); return r, os.strerror(ctypes.get_errno())\n"
CALLS = "import ctypes, errno, os; libc = ctypes.CDLL(None, use_errno=True); x86 = os.uname().machine == 'x86_64'\ndef call(x86_64, aarch64, *a):\n  return libc.syscall(x86_64 if x86 else aarch64, *a) >= 0 and 'DONE' or errno.errorcode[ctypes.get_errno()]\n"
TRY = "def attempt(name, function):\n  try: print(name, 'DONE', function())\n  except (OSError, ValueError) as error: print(name, type(error).__name__)\n"
MACHINE_CODE = "import ctypes, mmap\ndef run(code):\n  page = mmap.mmap(-1, 4096, prot=7); page.write(code)\n  return ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()\n"
