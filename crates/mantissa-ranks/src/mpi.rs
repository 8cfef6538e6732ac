//! Links between processes that a launcher of MPI has started (`mpiexec`, `srun --mpi=pmi2`), by the standard ABI of MPI 5: the
//! library is found when the program runs, and any implementation of the ABI will do.
//!
//! Constants and signatures: MPI Forum, "MPI: A Message-Passing Interface Standard, Version 5.0", chapter 20 (Application
//! Binary Interface), appendix A.

use std::ffi::{c_int, c_void};
use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use libloading::Library;

use crate::error::{RankError, Result};
use crate::launch::Rank;
use crate::link::{Link, Traffic};

/// Names under which the library of the ABI is installed.
const LIBRARIES: [&str; 2] = ["libmpi_abi.so.1", "libmpi_abi.so"];
/// Variable that names the library.
const LIBRARY: &str = "MANTISSA_MPI";

type Comm = *mut c_void;
type Datatype = *mut c_void;
type Request = *mut c_void;

const COMM_WORLD: usize = 0x101;
const BYTE: usize = 0x247;
const ERRORS_RETURN: usize = 0x143;
const REQUEST_NULL: usize = 0x180;
const THREAD_SERIALIZED: c_int = 2048;
/// Messages of all kinds have one tag: a rank knows what comes next.
const TAG: c_int = 7;
/// Longest part of a message: the count of the ABI's calls is a C int.
const MOST: usize = 1 << 30;
/// Polls without a pause.
const QUICK: u32 = 64;
/// Pause between two later polls: a rank that waits leaves its core to others.
const PAUSE: Duration = Duration::from_micros(200);

/// Status of a message.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Status {
    source: c_int,
    tag: c_int,
    error: c_int,
    internal: [c_int; 5],
}

/// True once this process has asked to join the others.
static JOINED: AtomicBool = AtomicBool::new(false);
/// True once it has left them.
static LEFT: AtomicBool = AtomicBool::new(false);
/// Ends all processes; set once the library is initialized.
static ABORT: OnceLock<unsafe extern "C" fn(Comm, c_int) -> c_int> = OnceLock::new();

/// Functions of the library.
struct Calls {
    isend: unsafe extern "C" fn(*const c_void, c_int, Datatype, c_int, c_int, Comm, *mut Request) -> c_int,
    test: unsafe extern "C" fn(*mut Request, *mut c_int, *mut Status) -> c_int,
    iprobe: unsafe extern "C" fn(c_int, c_int, Comm, *mut c_int, *mut Status) -> c_int,
    get_count: unsafe extern "C" fn(*const Status, Datatype, *mut c_int) -> c_int,
    recv: unsafe extern "C" fn(*mut c_void, c_int, Datatype, c_int, c_int, Comm, *mut Status) -> c_int,
    finalize: unsafe extern "C" fn() -> c_int,
}

/// Message that is under way: the library reads its bytes until the request is done.
struct Sending {
    bytes: Vec<u8>,
    request: Request,
}

/// One process among those of a launcher of MPI.
pub struct MpiLink {
    calls: Calls,
    rank: usize,
    size: usize,
    sending: Vec<Sending>,
    traffic: Traffic,
}

// SAFETY: requests are handles of the library, which `join` requires to take calls from any thread, one at a time
// (`MPI_THREAD_SERIALIZED`): the link is not `Sync`, and there is one in a process. Bytes are owned.
unsafe impl Send for MpiLink {}

impl fmt::Debug for MpiLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MpiLink").field("rank", &self.rank).field("size", &self.size).finish_non_exhaustive()
    }
}

impl MpiLink {
    /// Joins the processes that the launcher started, among which `rank` is this one.
    ///
    /// # Errors
    /// [`RankError::Library`] if there is no library with the ABI, [`RankError::Transport`] if it refuses, or was joined before;
    /// [`RankError::Processes`] if it is not that of the launcher.
    pub fn join(rank: Rank) -> Result<Self> {
        let again = RankError::Transport { call: "MPI_Init_thread", code: -1 };
        if JOINED.swap(true, Ordering::SeqCst) {
            return Err(again);
        }
        let library = open()?;
        let library = ManuallyDrop::new(library);
        // SAFETY: the signatures are those of the standard's appendix A, and the library is never unloaded.
        let link = unsafe {
            let init: unsafe extern "C" fn(*mut c_int, *mut c_void, c_int, *mut c_int) -> c_int =
                symbol(&library, "MPI_Init_thread")?;
            let handler: unsafe extern "C" fn(Comm, *mut c_void) -> c_int =
                symbol(&library, "MPI_Comm_set_errhandler")?;
            let comm_rank: unsafe extern "C" fn(Comm, *mut c_int) -> c_int =
                symbol(&library, "MPI_Comm_rank")?;
            let comm_size: unsafe extern "C" fn(Comm, *mut c_int) -> c_int =
                symbol(&library, "MPI_Comm_size")?;
            let calls = Calls {
                isend: symbol(&library, "MPI_Isend")?,
                test: symbol(&library, "MPI_Test")?,
                iprobe: symbol(&library, "MPI_Iprobe")?,
                get_count: symbol(&library, "MPI_Get_count")?,
                recv: symbol(&library, "MPI_Recv")?,
                finalize: symbol(&library, "MPI_Finalize")?,
            };
            let (mut provided, mut rank, mut size) = (0, 0, 0);
            check(
                "MPI_Init_thread",
                init(std::ptr::null_mut(), std::ptr::null_mut(), THREAD_SERIALIZED, &mut provided),
            )?;
            if provided < THREAD_SERIALIZED {
                return Err(RankError::Transport { call: "MPI_Init_thread", code: provided });
            }
            let abort: unsafe extern "C" fn(Comm, c_int) -> c_int = symbol(&library, "MPI_Abort")?;
            // Set once: a process joins once.
            let _ = ABORT.set(abort);
            check("MPI_Comm_set_errhandler", handler(world(), handle(ERRORS_RETURN)))?;
            check("MPI_Comm_rank", comm_rank(world(), &mut rank))?;
            check("MPI_Comm_size", comm_size(world(), &mut size))?;
            let (rank, size) = (rank.cast_unsigned() as usize, size.cast_unsigned() as usize);
            MpiLink { calls, rank, size, sending: Vec::new(), traffic: Traffic::default() }
        };
        let count = rank.count.unwrap_or(1);
        match (link.rank, link.size) == (rank.index, count) {
            true => Ok(link),
            // Each would take itself for the only one, and all write the same run.
            false => Err(RankError::Processes { expected: count, got: link.size }),
        }
    }

    /// Ends all processes with exit code `code` if this one has joined them and not left: they would wait for it.
    pub fn abort_unless_left(code: i32) {
        if let Some(abort) = ABORT.get().filter(|_| !LEFT.load(Ordering::SeqCst)) {
            // SAFETY: the library is initialized, and the link, which makes all other calls, is gone.
            unsafe { abort(world(), code) };
        }
    }

    /// Lets messages that are under way go on, and frees those that have arrived.
    fn progress(&mut self) -> Result<()> {
        let mut at = 0;
        while let Some(sending) = self.sending.get_mut(at) {
            let (mut done, mut status) = (0, Status::default());
            // SAFETY: the request is that of an unfinished `MPI_Isend`.
            check("MPI_Test", unsafe { (self.calls.test)(&mut sending.request, &mut done, &mut status) })?;
            match done {
                0 => at += 1,
                _ => drop(self.sending.swap_remove(at)),
            }
        }
        Ok(())
    }

    /// Sends one part of a message.
    fn send_part(&mut self, to: c_int, bytes: Vec<u8>) -> Result<()> {
        let mut request = std::ptr::null_mut();
        // SAFETY: the bytes stay where they are until the request is done: `sending` owns them.
        let code = unsafe {
            (self.calls.isend)(
                bytes.as_ptr().cast(),
                c_int::try_from(bytes.len()).unwrap_or(c_int::MAX),
                handle(BYTE),
                to,
                TAG,
                world(),
                &mut request,
            )
        };
        self.sending.push(Sending { bytes, request });
        check("MPI_Isend", code)?;
        self.progress()
    }

    /// Waits for the next part of a message, and appends it; returns its length.
    fn receive_part(&mut self, from: c_int, message: &mut Vec<u8>) -> Result<usize> {
        let mut polls = 0u32;
        let count = loop {
            let (mut found, mut status) = (0, Status::default());
            // SAFETY: the arguments are of the declared types and live through the call.
            check("MPI_Iprobe", unsafe { (self.calls.iprobe)(from, TAG, world(), &mut found, &mut status) })?;
            if found != 0 {
                let mut count = 0;
                // SAFETY: the status is that of a message that was found.
                check("MPI_Get_count", unsafe { (self.calls.get_count)(&status, handle(BYTE), &mut count) })?;
                break usize::try_from(count).unwrap_or(0);
            }
            self.progress()?;
            polls = polls.saturating_add(1);
            if polls > QUICK {
                thread::sleep(PAUSE);
            }
        };
        let at = message.len();
        message.try_reserve_exact(count).map_err(|_| RankError::Memory { bytes: count as u64 })?;
        message.resize(at + count, 0);
        let (to, mut status) = (&mut message[at..], Status::default());
        // SAFETY: `to` has `count` bytes, and only this thread receives.
        check("MPI_Recv", unsafe {
            (self.calls.recv)(
                to.as_mut_ptr().cast(),
                c_int::try_from(count).unwrap_or(0),
                handle(BYTE),
                from,
                TAG,
                world(),
                &mut status,
            )
        })?;
        Ok(count)
    }
}

impl Link for MpiLink {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    /// Sends parts of 1 GiB; a shorter one, which may be empty, ends the message.
    fn send(&mut self, to: usize, mut message: Vec<u8>) -> Result<()> {
        let lost = || RankError::Lost { rank: to };
        let number = c_int::try_from(to).ok().filter(|_| to < self.size).ok_or_else(lost)?;
        self.traffic.sent += message.len() as u64;
        while message.len() >= MOST {
            let rest = message.split_off(MOST);
            self.send_part(number, std::mem::replace(&mut message, rest))?;
        }
        self.send_part(number, message)
    }

    fn receive(&mut self, from: usize) -> Result<Vec<u8>> {
        let lost = || RankError::Lost { rank: from };
        let number = c_int::try_from(from).ok().filter(|_| from < self.size).ok_or_else(lost)?;
        let begin = Instant::now();
        let mut message = Vec::new();
        while self.receive_part(number, &mut message)? == MOST {}
        self.traffic.waited += begin.elapsed();
        Ok(message)
    }

    fn traffic(&self) -> Traffic {
        self.traffic
    }

    /// Leaves the other processes. One that ends without it is a failure to the launcher, which ends the others.
    fn leave(mut self: Box<Self>) -> Result<()> {
        while !self.sending.is_empty() {
            self.progress()?;
            thread::sleep(PAUSE);
        }
        LEFT.store(true, Ordering::SeqCst);
        // SAFETY: initialized by `join`, and the link, which makes all other calls, ends here.
        check("MPI_Finalize", unsafe { (self.calls.finalize)() })
    }
}

impl Drop for Sending {
    fn drop(&mut self) {
        // The library may still read the bytes of a message that has not arrived, as after a failure.
        if !self.request.is_null() && self.request as usize != REQUEST_NULL {
            std::mem::forget(std::mem::take(&mut self.bytes));
        }
    }
}

fn handle(value: usize) -> *mut c_void {
    std::ptr::without_provenance_mut(value)
}

fn world() -> Comm {
    handle(COMM_WORLD)
}

/// Opens the library of the ABI.
fn open() -> Result<Library> {
    let named = std::env::var(LIBRARY).ok();
    let names: Vec<&str> = named.as_deref().map_or(LIBRARIES.to_vec(), |name| vec![name]);
    let mut said = String::new();
    for name in names {
        // SAFETY: initializers of an MPI library have no demands on the process that loads it.
        match unsafe { Library::new(name) } {
            Ok(library) => return Ok(library),
            Err(error) => said = error.to_string(),
        }
    }
    Err(RankError::Library { said })
}

/// Finds a function of the library.
///
/// # Safety
/// `T` must be the type of a pointer to the function.
unsafe fn symbol<T: Copy>(library: &Library, name: &str) -> Result<T> {
    // SAFETY: by the contract of this function.
    let found = unsafe { library.get::<T>(name.as_bytes()) };
    found.map(|function| *function).map_err(|error| RankError::Library { said: error.to_string() })
}

fn check(call: &'static str, code: c_int) -> Result<()> {
    if code == 0 { Ok(()) } else { Err(RankError::Transport { call, code }) }
}
