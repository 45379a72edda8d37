"""The system calls that programs inside may make: one table, from which every filter is made.

seccomp.py compiles it to BPF for the process backend and for a container's own processes; tool_service/sandbox/
seccomp_profile.py writes it as a Docker profile. What is not named here does not exist inside: it fails with ENOSYS,
also when a later kernel brings it, and libc falls back. What is known and refused fails with EPERM, so that a program
has an error to show. Entries read `name:x86-64:aarch64`; `-` where the architecture has no such call.
"""

import errno
from typing import NamedTuple, TypeAlias

_ALLOWED = """
# files
read:0:63 write:1:64 open:2:- openat:257:56 openat2:437:437 creat:85:- close:3:57 close_range:436:436 stat:4:-
fstat:5:80 lstat:6:- newfstatat:262:79 statx:332:291 lseek:8:62 pread64:17:67 pwrite64:18:68 readv:19:65 writev:20:66
preadv:295:69 pwritev:296:70 preadv2:327:286 pwritev2:328:287 access:21:- faccessat:269:48 faccessat2:439:439
getdents:78:- getdents64:217:61 getcwd:79:17 chdir:80:49 fchdir:81:50 rename:82:- renameat:264:38 renameat2:316:276
mkdir:83:- mkdirat:258:34 rmdir:84:- link:86:- linkat:265:37 unlink:87:- unlinkat:263:35 symlink:88:- symlinkat:266:36
readlink:89:- readlinkat:267:78 chmod:90:- fchmod:91:52 fchmodat:268:53 fchmodat2:452:452 chown:92:- fchown:93:55
lchown:94:- fchownat:260:54 umask:95:166 truncate:76:45 ftruncate:77:46 fallocate:285:47 fsync:74:82 fdatasync:75:83
sync_file_range:277:84 sendfile:40:71 copy_file_range:326:285 utime:132:- utimes:235:- futimesat:261:-
utimensat:280:88 statfs:137:43 fstatfs:138:44 flock:73:32 dup:32:23 dup2:33:- dup3:292:24
fadvise64:221:223 readahead:187:213
# memory
mmap:9:222 mprotect:10:226 munmap:11:215 brk:12:214 mremap:25:216 msync:26:227 mincore:27:232 madvise:28:233
mlock:149:228 mlock2:325:284 munlock:150:229 mlockall:151:230 munlockall:152:231 membarrier:324:283 mseal:462:462
map_shadow_stack:453:453 pkey_mprotect:329:288 pkey_alloc:330:289 pkey_free:331:290 get_mempolicy:239:236
# processes and threads
fork:57:- vfork:58:- execve:59:221 execveat:322:281 exit:60:93 exit_group:231:94 wait4:61:260 waitid:247:95
getpid:39:172 gettid:186:178 getppid:110:173 getpgid:121:155 getpgrp:111:- setpgid:109:154 getsid:124:156
setsid:112:157 set_tid_address:218:96 set_robust_list:273:99 get_robust_list:274:100 futex:202:98 futex_waitv:449:449
rseq:334:293 arch_prctl:158:- restart_syscall:219:128 pidfd_open:434:434
# signals
kill:62:129 tkill:200:130 tgkill:234:131 pidfd_send_signal:424:424 rt_sigqueueinfo:129:138 rt_tgsigqueueinfo:297:240
rt_sigaction:13:134 rt_sigprocmask:14:135 rt_sigreturn:15:139 rt_sigpending:127:136 rt_sigtimedwait:128:137
rt_sigsuspend:130:133 sigaltstack:131:132 pause:34:- signalfd:282:- signalfd4:289:74
# limits and scheduling
getrlimit:97:163 setrlimit:160:164 getrusage:98:165 times:100:153 sysinfo:99:179 uname:63:160
getpriority:140:141 sched_yield:24:124 sched_getaffinity:204:123
sched_getparam:143:121 sched_setparam:142:118 sched_getscheduler:145:120 sched_getattr:315:275
sched_get_priority_max:146:125 sched_get_priority_min:147:126 sched_rr_get_interval:148:127 ioprio_get:252:31
getcpu:309:168 getrandom:318:278
# users
getuid:102:174 geteuid:107:175 getresuid:118:148 setuid:105:146 setreuid:113:145 setresuid:117:147 setfsuid:122:151
getgid:104:176 getegid:108:177 getresgid:120:150 setgid:106:144 setregid:114:143 setresgid:119:149 setfsgid:123:152
getgroups:115:158 setgroups:116:159 capget:125:90 capset:126:91
# time
nanosleep:35:101 clock_nanosleep:230:115 clock_gettime:228:113 clock_getres:229:114 gettimeofday:96:169 time:201:-
alarm:37:- getitimer:36:102 setitimer:38:103 timer_create:222:107 timer_settime:223:110 timer_gettime:224:108
timer_getoverrun:225:109 timer_delete:226:111 timerfd_create:283:85 timerfd_settime:286:86 timerfd_gettime:287:87
# waiting and pipes
poll:7:- ppoll:271:73 select:23:- pselect6:270:72 epoll_create:213:- epoll_create1:291:20 epoll_ctl:233:21
epoll_wait:232:- epoll_pwait:281:22 epoll_pwait2:441:441 eventfd:284:- eventfd2:290:19 pipe:22:- pipe2:293:59
splice:275:76 tee:276:77
# sockets that exist
connect:42:203 accept:43:202 accept4:288:242 sendto:44:206 recvfrom:45:207 sendmsg:46:211 recvmsg:47:212
sendmmsg:307:269 recvmmsg:299:243 shutdown:48:210 bind:49:200 listen:50:201 getsockname:51:204 getpeername:52:205
getsockopt:55:209
# walls that a program builds for itself
seccomp:317:277
# walls that a supervisor builds: of a set of rules that it has made before
landlock_add_rule:445:445 landlock_restrict_self:446:446
"""
_OF_OWN_FILES = """
setxattr:188:5 lsetxattr:189:6 fsetxattr:190:7 getxattr:191:8 lgetxattr:192:9 fgetxattr:193:10 listxattr:194:11
llistxattr:195:12 flistxattr:196:13 removexattr:197:14 lremovexattr:198:15 fremovexattr:199:16
"""
"""Extended attributes. Landlock does not cover them: where others' files can be named there are none (ENOTSUP)."""
_BEFORE = """
landlock_create_ruleset:444:444
"""
"""What a supervisor does before its filter is there, and nobody after: each rule of a set is memory of the kernel's
that no limit counts. Refused, but by filters that are there from the start."""
_IGNORED = """
sync:162:81 syncfs:306:267
"""
"""Succeed and do nothing: they would flush the disks of the whole machine for files that end with the sandbox."""
_DENIED = """
# mounts and namespaces
mount:165:40 umount2:166:39 pivot_root:155:41 chroot:161:51 open_tree:428:428 move_mount:429:429 fsopen:430:430
fsconfig:431:431 fsmount:432:432 fspick:433:433 mount_setattr:442:442 unshare:272:97 setns:308:268
# other processes
ptrace:101:117 process_vm_readv:310:270 process_vm_writev:311:271 process_madvise:440:440 process_mrelease:448:448
kcmp:312:272 pidfd_getfd:438:438 migrate_pages:256:238 move_pages:279:239
# kernel interfaces
bpf:321:280 perf_event_open:298:241 userfaultfd:323:282 io_uring_setup:425:425 io_uring_enter:426:426
io_uring_register:427:427 vmsplice:278:75 keyctl:250:219 add_key:248:217 request_key:249:218 modify_ldt:154:-
iopl:172:- ioperm:173:- fanotify_init:300:262 fanotify_mark:301:263 name_to_handle_at:303:264
open_by_handle_at:304:265
# memory no limit counts
memfd_create:319:279 memfd_secret:447:447 shmget:29:194 shmat:30:196 shmctl:31:195 shmdt:67:197 semget:64:190
semop:65:193 semctl:66:191 semtimedop:220:192 msgget:68:186 msgsnd:69:189 msgrcv:70:188 msgctl:71:187
mq_open:240:180 mq_unlink:241:181 mq_timedsend:242:182 mq_timedreceive:243:183 mq_notify:244:184 mq_getsetattr:245:185
inotify_init:253:- inotify_init1:294:26 inotify_add_watch:254:27 inotify_rm_watch:255:28
# machine
swapon:167:224 swapoff:168:225 reboot:169:142 sethostname:170:161 setdomainname:171:162 init_module:175:105
finit_module:313:273 delete_module:176:106 kexec_load:246:104 kexec_file_load:320:294 acct:163:89 quotactl:179:60
quotactl_fd:443:443 settimeofday:164:170 clock_settime:227:112 clock_adjtime:305:266 adjtimex:159:171 syslog:103:116
vhangup:153:58 sched_setattr:314:274 ioprio_set:251:30 set_mempolicy:238:237 mbind:237:235
"""
"""Fail with EPERM. memfd, System V, message queues and inotify's would let programs hold memory that shows in no
process's size; System V and message queues would also outlive those who made them."""
_ABSENT = """
clone3:435:435 io_setup:206:0 io_destroy:207:1 io_submit:209:2 io_cancel:210:3 io_getevents:208:4 io_pgetevents:333:292
remap_file_pages:216:234 set_mempolicy_home_node:450:450 cachestat:451:451 futex_wake:454:454 futex_wait:455:455
futex_requeue:456:456 statmount:457:457 listmount:458:458 lsm_get_self_attr:459:459 lsm_set_self_attr:460:460
lsm_list_modules:461:461
"""
"""ENOSYS, as all that is not in the table; named for filters whose default is another. Programs have fallbacks for
them, which they take at this error only. Slots of asynchronous I/O are few and the whole machine's."""
_CHECKED = """
clone:56:220 socket:41:198 socketpair:53:199 ioctl:16:29 prctl:157:167 personality:135:92 mknod:133:- mknodat:259:33
sched_setscheduler:144:119 setpriority:141:140 prlimit64:302:261 fcntl:72:25
sched_setaffinity:203:122 setsockopt:54:208
"""
"""Allowed by their arguments: see `_checks`."""


class Check(NamedTuple):
    """Passed if the low 32 bits of an argument, under `mask`, are one of `values`, or, where these are `refused`, none
    of them; otherwise the call fails with `error` (0: it succeeds and does nothing)."""

    argument: int
    mask: int
    values: tuple[int, ...]
    error: int
    refused: bool = False


Verdict: TypeAlias = int | tuple[Check, ...]
"""The errno that a call fails with (0: it succeeds and does nothing), or the checks it must pass, () for none."""

WHOLE = 0xFFFFFFFF
X32_BIT = 0x40000000
"""Set in the numbers of the x32 ABI, which x86-64 kernels may offer beside their own."""
_AF_UNIX, _AF_INET, _AF_INET6 = 1, 2, 10
_SOCKET_KIND = 0xF  # above it are SOCK_CLOEXEC and SOCK_NONBLOCK
_STREAM, _DATAGRAM, _SEQPACKET = 1, 2, 5
_DEFAULT, _TCP, _UDP = 0, 6, 17
_BUFFER_SIZES = (7, 8)
"""SO_SNDBUF and SO_RCVBUF: sockets keep the sizes that they are counted with, as where a kernel allows no more. At
other levels these numbers are rare (IP_PKTINFO, TCP_SYNCNT)."""
_CLONE_DENIED = 0x7E020000 | 0x8000
"""Every CLONE_NEW* that clone takes, and CLONE_PARENT. clone3 hides its flags in memory, and so does not exist."""
_S_IFMT, _PLAIN_FILES = 0o170000, (0, 0o100000, 0o010000, 0o140000)  # regular, FIFO, socket
_PRIO_PROCESS = 0
_SCHED_RESET_ON_FORK, _ORDINARY_POLICIES = 0x40000000, (0, 3, 5)  # SCHED_OTHER, BATCH, IDLE
_PERSONALITIES = (0, 0xFFFFFFFF)  # the ordinary one, and the question which one it is
_IOCTLS = (
    *(0x5401, 0x5402, 0x5403, 0x5404, 0x5409, 0x540A, 0x540B, 0x540E, 0x540F, 0x5410),  # TCGETS ... TIOCSPGRP
    *(0x5411, 0x5413, 0x5414, 0x541B, 0x5420, 0x5421, 0x5422, 0x5424, 0x5425, 0x5429),  # TIOCOUTQ ... TIOCGSID
    *(0x802C542A, 0x402C542B, 0x402C542C, 0x402C542D),  # TCGETS2, TCSETS2, TCSETSW2, TCSETSF2
    *(0x80045430, 0x40045431, 0x5441),  # TIOCGPTN, TIOCSPTLCK, TIOCGPTPEER
    *(0x5450, 0x5451, 0x5452, 0x5460),  # FIONCLEX, FIOCLEX, FIOASYNC, FIOQSIZE
    *(0x8905, 0x8910, 0x8912, 0x8913, 0x8915, 0x8919, 0x891B, 0x8921, 0x8927, 0x8933),  # SIOCATMARK, SIOCGIF*
)
"""Of terminals, descriptors and interfaces; without TIOCSTI and TIOCLINUX, which type for others, and TIOCSETD."""
_FCNTLS = (*range(12), 15, 16, 36, 37, 38, 1025, *range(1030, 1035))
"""Without SETLEASE and NOTIFY, which hold up or watch others' work on a shared file."""
_PRCTLS = (
    *range(1, 5),  # PDEATHSIG, DUMPABLE
    *(7, 8, 15, 16, 21, 22, 23, 24, 27, 29, 30),  # KEEPCAPS, NAME, SECCOMP, CAPBSET, GET_SECUREBITS, TIMERSLACK
    *range(36, 43),  # CHILD_SUBREAPER, NO_NEW_PRIVS, GET_TID_ADDRESS, THP_DISABLE
    *(47, 50, 51, 52, 54, 55, 56, 60, 61, 63, 64, 65, 66),  # CAP_AMBIENT, SVE, PAC, MTE, SME, MDWE
    0x53564D41,  # SET_VMA: names of mappings
)
"""Without SET_MM, SET_SECUREBITS, SET_PTRACER, IO_FLUSHER, SPECULATION and SCHED_CORE control, MEMORY_MERGE."""


def _checks(isolated: bool) -> dict[str, tuple[Check, ...]]:
    families = (_AF_UNIX, _AF_INET, _AF_INET6) if isolated else ()
    plain_file = (_S_IFMT, _PLAIN_FILES, errno.EPERM)
    return {
        "clone": (Check(0, _CLONE_DENIED, (0,), errno.EPERM),),
        "socket": (
            Check(0, WHOLE, families, errno.EAFNOSUPPORT),
            Check(1, _SOCKET_KIND, (_STREAM, _DATAGRAM, _SEQPACKET), errno.EPERM),
            Check(2, WHOLE, (_DEFAULT, _TCP, _UDP), errno.EPROTONOSUPPORT),
        ),
        "setsockopt": (Check(2, WHOLE, _BUFFER_SIZES, 0, refused=True),),
        "socketpair": (Check(0, WHOLE, (_AF_UNIX,), errno.EAFNOSUPPORT),),
        "ioctl": (Check(1, WHOLE, _IOCTLS, errno.ENOTTY),),
        "fcntl": (Check(1, WHOLE, _FCNTLS, errno.EINVAL),),
        "prctl": (Check(0, WHOLE, _PRCTLS, errno.EPERM),),
        "personality": (Check(0, WHOLE, _PERSONALITIES, errno.EPERM),),
        "mknod": (Check(1, *plain_file),),
        "mknodat": (Check(2, *plain_file),),
        # Of the caller alone: a supervisor has the uid of its programs, which could starve it or take its descriptors.
        "prlimit64": (Check(0, WHOLE, (0,), errno.EPERM),),
        "setpriority": (Check(0, WHOLE, (_PRIO_PROCESS,), errno.EPERM), Check(1, WHOLE, (0,), errno.EPERM)),
        "sched_setaffinity": () if isolated else (Check(0, WHOLE, (0,), errno.EPERM),),  # the uid may be the service's
        "sched_setscheduler": (
            Check(0, WHOLE, (0,), errno.EPERM),
            Check(1, WHOLE & ~_SCHED_RESET_ON_FORK, _ORDINARY_POLICIES, errno.EPERM),
        ),
    }


def _entries(table: str) -> dict[str, dict[str, int]]:
    """Name of each call of a table: its number by architecture."""
    found = {}
    for line in table.splitlines():
        for entry in () if line.startswith("#") else line.split():
            name, x86_64, aarch64 = entry.split(":")
            pairs = (("x86_64", x86_64), ("aarch64", aarch64))
            found[name] = {machine: int(number) for machine, number in pairs if number != "-"}
    return found


NUMBERS: dict[str, dict[str, int]] = {}
for _table in (_ALLOWED, _OF_OWN_FILES, _BEFORE, _IGNORED, _DENIED, _ABSENT, _CHECKED):
    NUMBERS |= _entries(_table)


def verdicts(isolated: bool, from_the_start: bool = False) -> dict[str, Verdict]:
    """Of every call of the table. `isolated`: root, network namespace and uid are the sandbox's own, so that sockets of
    the families unix, inet and inet6 may be used; elsewhere no socket but a pair. `from_the_start`: the
    supervisor has yet to do what is `_BEFORE`."""
    checks = _checks(isolated)
    return {
        **dict.fromkeys(_entries(_ALLOWED), ()),
        **dict.fromkeys(_entries(_OF_OWN_FILES), () if isolated else errno.ENOTSUP),
        **dict.fromkeys(_entries(_BEFORE), () if from_the_start else errno.EPERM),
        **dict.fromkeys(_entries(_IGNORED), 0),
        **dict.fromkeys(_entries(_DENIED), errno.EPERM),
        **dict.fromkeys(_entries(_ABSENT), errno.ENOSYS),
        **{name: checks[name] for name in _entries(_CHECKED)},
    }
