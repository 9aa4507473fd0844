//! What the host is, as its files tell: read into memory in place, for what `std` reads them into
//! it allocates, and ends the process where there is none.

use std::sync::OnceLock;

use crate::backend::DeviceInfo;
use crate::error::{Error, Result, text};

/// The first bytes of a file, as many as there is room for. What is no text is left out.
struct Head {
    bytes: [u8; 8192],
    len: usize,
}

impl Head {
    /// Nothing, where the file cannot be read. Paths of fewer than 384 bytes allocate nothing.
    fn of(path: &str) -> Head {
        use std::io::Read;
        let (mut bytes, mut len) = ([0; 8192], 0);
        if let Ok(mut file) = std::fs::File::open(path) {
            while let Ok(read @ 1..) = file.read(&mut bytes[len..]) {
                len += read;
            }
        }
        Head { bytes, len }
    }

    fn text(&self) -> &str {
        let bytes = &self.bytes[..self.len];
        std::str::from_utf8(bytes).unwrap_or_else(|error| {
            // As far as it is valid.
            std::str::from_utf8(&bytes[..error.valid_up_to()]).unwrap_or_default()
        })
    }

    /// The value of a line `key: value`.
    fn field(&self, key: &str) -> Option<&str> {
        let line = self.text().lines().find(|line| line.starts_with(key))?;
        Some(line.split_once(':')?.1.trim())
    }

    /// The value of a line `key: value kB`, in bytes; 0 if there is none.
    fn bytes(&self, key: &str) -> u64 {
        let value = self.field(key).and_then(|value| value.strip_suffix("kB"));
        let kb = value.and_then(|kb| kb.trim().parse().ok());
        kb.map_or(0, |kb: u64| kb.saturating_mul(1024))
    }
}

/// # Errors
/// There is no memory for the name.
pub(crate) fn device_info(op: &'static str) -> Result<DeviceInfo> {
    let cpuinfo = Head::of("/proc/cpuinfo");
    let meminfo = Head::of("/proc/meminfo");
    let name = cpuinfo
        .field("model name")
        .unwrap_or(std::env::consts::ARCH);
    let kept = text!("{name}");
    if kept.len() < name.len() {
        return Err(Error::out_of_host_memory(op, name.len()));
    }
    Ok(DeviceInfo {
        name: kept,
        total_memory: meminfo.bytes("MemTotal"),
        free_memory: meminfo.bytes("MemAvailable"),
        compute_capability: (0, 0),
        num_units: available_threads() as u32,
    })
}

/// Threads that the process may run at a time, at least one: the processors that it may run on, or
/// fewer if the quota of its control group is less. Asked for once: the answer comes from files.
pub(super) fn available_threads() -> usize {
    static THREADS: OnceLock<usize> = OnceLock::new();
    *THREADS.get_or_init(threads)
}

#[cfg(not(target_os = "linux"))]
fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get())
}

/// As [`std::thread::available_parallelism`] counts them.
#[cfg(target_os = "linux")]
fn threads() -> usize {
    // SAFETY: a set of processors is an array of bits, of which zeros are one.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: the set has the size that is given, and is valid for a write.
    let code = unsafe { libc::sched_getaffinity(0, size_of_val(&set), &mut set) };
    let processors = match code {
        // SAFETY: the set has been filled.
        0 => unsafe { libc::CPU_COUNT(&set) as usize },
        // A machine with more processors than the set has bits.
        // SAFETY: asks for a number.
        _ => unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) as usize },
    };
    processors.min(quota::processors()).max(1)
}

/// What control groups allow, by the files that file-hierarchy(7) and cgroups(7) describe.
#[cfg(target_os = "linux")]
mod quota {
    use arrayvec::ArrayString;

    use super::Head;

    /// Longer ones would be allocated to be opened; a group with such a path has no quota here.
    type Path = ArrayString<383>;

    fn path(parts: &[&str]) -> Option<Path> {
        let mut path = Path::new();
        parts
            .iter()
            .try_for_each(|part| path.try_push_str(part))
            .ok()?;
        Some(path)
    }

    /// Processors' worth of time of this process's group, rounded down; `usize::MAX` without a
    /// quota.
    pub fn processors() -> usize {
        of_groups(&Head::of("/proc/self/cgroup")).unwrap_or(usize::MAX)
    }

    /// Lines are `number:controllers:/path`, without controllers for version 2.
    fn of_groups(groups: &Head) -> Option<usize> {
        let mut unified = None;
        for line in groups.text().lines() {
            let fields = line
                .split_once(':')
                .and_then(|(_, rest)| rest.split_once(':'));
            let Some((controllers, group)) = fields else {
                continue;
            };
            let group = group.trim_start_matches('/');
            if controllers.split(',').any(|name| name == "cpu") {
                // Version 1, which says itself that it has the processors, is what counts.
                return first_version(group);
            }
            if controllers.is_empty() {
                unified = Some(group);
            }
        }
        second_version(unified?)
    }

    /// A group's quota, or that of a group above it, whichever is least.
    fn least(mount: &str, group: &str, quota: impl Fn(&str) -> Option<usize>) -> Option<usize> {
        let whole = path(&[mount, "/", group])?;
        let mut folder = whole.trim_end_matches('/');
        let mut least: Option<usize> = None;
        while folder.len() >= mount.len() {
            let here = quota(folder);
            least = least.into_iter().chain(here).min();
            folder = folder.rsplit_once('/')?.0;
        }
        least
    }

    /// `cpu.max` is `quota period`, or `max period`.
    fn second_version(group: &str) -> Option<usize> {
        least("/sys/fs/cgroup", group, |folder| {
            let file = Head::of(&path(&[folder, "/cpu.max"])?);
            let mut numbers = file.text().split_whitespace().map(str::parse::<usize>);
            let (quota, period) = (numbers.next()?.ok()?, numbers.next()?.ok()?);
            quota.checked_div(period)
        })
    }

    /// `cpu.cfs_quota_us` is negative where there is none.
    fn first_version(group: &str) -> Option<usize> {
        let number = |folder: &str, name: &str| {
            let file = Head::of(&path(&[folder, "/cpu.", name])?);
            file.text().trim().parse::<usize>().ok()
        };
        let mounts = ["/sys/fs/cgroup/cpu", "/sys/fs/cgroup/cpu,cpuacct"];
        mounts.into_iter().find_map(|mount| {
            least(mount, group, |folder| {
                let period = number(folder, "cfs_period_us")?;
                number(folder, "cfs_quota_us")?.checked_div(period)
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Here and wherever the tests run.
    #[test]
    fn threads_are_those_that_std_counts() {
        let expected = std::thread::available_parallelism().unwrap().get();
        assert_eq!(available_threads(), expected);
    }

    #[test]
    fn heads_are_cut_at_a_character() {
        let mut head = Head::of("/there/is/none");
        assert_eq!(
            (head.text(), head.field("a"), head.bytes("a")),
            ("", None, 0)
        );
        let text = "a: b c\nd : 7 kB\nno kB: 1\n\u{e9}";
        head.bytes[..text.len()].copy_from_slice(text.as_bytes());
        head.len = text.len() - 1;
        assert_eq!((head.field("a"), head.bytes("d")), (Some("b c"), 7 << 10));
        assert_eq!((head.bytes("no"), head.text().len()), (0, text.len() - 2));
    }
}
