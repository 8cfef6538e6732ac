//! Rank of a process, from the environment that its launcher sets.

use crate::error::{RankError, Result};

/// Rank of this process among those that a launcher started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rank {
    /// Number from 0.
    pub index: usize,
    /// Number of processes; `None` if the launcher does not tell.
    pub count: Option<usize>,
    /// Launcher, for messages.
    pub launcher: &'static str,
}

/// Variables of a launcher.
struct Launcher {
    name: &'static str,
    index: &'static str,
    /// Index of the first process; 0 without.
    first: Option<&'static str>,
    count: Option<&'static str>,
    starts: Starts,
}

/// Kind of the processes that a launcher starts.
#[derive(Clone, Copy)]
enum Starts {
    /// In step, connected by MPI.
    Connected,
    /// In step, without MPI.
    Unconnected,
    /// Each by itself.
    Apart,
    /// In step where this variable has their number, connected by MPI where the other is set.
    Steps { tasks: &'static str, connected: &'static str },
}

/// Launchers, the innermost first: a launcher of MPI runs inside an allocation of Slurm, an array inside Slurm has no step.
///
/// Sources: Open MPI, "Environment variables set by mpirun"; MPICH, the Process Management Interface; Slurm, `srun` and
/// `sbatch`, "output environment variables"; torchrun, "Environment Variables"; Kubernetes, "Indexed Job".
const LAUNCHERS: [Launcher; 6] = [
    Launcher {
        name: "Open MPI",
        index: "OMPI_COMM_WORLD_RANK",
        first: None,
        count: Some("OMPI_COMM_WORLD_SIZE"),
        starts: Starts::Connected,
    },
    Launcher {
        name: "MPI",
        index: "PMI_RANK",
        first: None,
        count: Some("PMI_SIZE"),
        starts: Starts::Connected,
    },
    Launcher {
        name: "Slurm array",
        index: "SLURM_ARRAY_TASK_ID",
        first: Some("SLURM_ARRAY_TASK_MIN"),
        count: Some("SLURM_ARRAY_TASK_COUNT"),
        starts: Starts::Apart,
    },
    Launcher {
        name: "Slurm",
        index: "SLURM_PROCID",
        first: None,
        count: Some("SLURM_NTASKS"),
        starts: Starts::Steps { tasks: "SLURM_STEP_NUM_TASKS", connected: "PMIX_RANK" },
    },
    Launcher {
        name: "torchrun",
        index: "RANK",
        first: None,
        count: Some("WORLD_SIZE"),
        starts: Starts::Unconnected,
    },
    Launcher {
        name: "Kubernetes",
        index: "JOB_COMPLETION_INDEX",
        first: None,
        count: Some("WORLD_SIZE"),
        starts: Starts::Unconnected,
    },
];

impl Rank {
    /// Reads the rank from the environment; `None` if no launcher has set one.
    ///
    /// # Errors
    /// [`RankError::Launcher`]: a variable that is no number, or an index that is not below the count.
    pub fn from_environment() -> Result<Option<Self>> {
        Self::from_variables(&|name| std::env::var(name).ok())
    }

    /// Reads the rank of a process that a launcher started to work in step with others; `None` for a process alone, which one
    /// of a Slurm array is, and the script of `sbatch` itself.
    ///
    /// # Errors
    /// As [`from_environment`](Self::from_environment); several processes that MPI does not connect.
    pub fn in_step() -> Result<Option<Self>> {
        Self::in_step_by(&|name| std::env::var(name).ok())
    }

    fn in_step_by(get: &dyn Fn(&str) -> Option<String>) -> Result<Option<Self>> {
        let several = |rank: &Self| rank.count.is_some_and(|count| count > 1);
        let Some(rank) = Self::from_variables(get)?.filter(several) else { return Ok(None) };
        let Some(launcher) = LAUNCHERS.iter().find(|launcher| launcher.name == rank.launcher) else {
            return Ok(None);
        };
        match launcher.starts {
            Starts::Connected => Ok(Some(rank)),
            Starts::Apart => Ok(None),
            Starts::Steps { tasks, .. } if get(tasks).is_none_or(|tasks| tasks.trim() == "1") => Ok(None),
            Starts::Steps { connected, .. } if get(connected).is_some() => Ok(Some(rank)),
            Starts::Steps { .. } | Starts::Unconnected => Err(RankError::Launcher {
                name: launcher.index,
                expected: "several processes that MPI connects (mpiexec, srun --mpi=pmi2), or one",
                got: format!("{} of {}", rank.index, rank.launcher),
            }),
        }
    }

    /// Returns the names of the variables that tell a rank.
    pub fn variables() -> impl Iterator<Item = &'static str> {
        LAUNCHERS.iter().map(|launcher| launcher.index)
    }

    /// Reads the rank from variables.
    fn from_variables(get: &dyn Fn(&str) -> Option<String>) -> Result<Option<Self>> {
        let number = |name: &'static str| -> Result<Option<usize>> {
            let Some(text) = get(name) else { return Ok(None) };
            let wrong = |_| RankError::Launcher { name, expected: "a number from 0", got: text.clone() };
            text.trim().parse().map(Some).map_err(wrong)
        };
        let Some(launcher) = LAUNCHERS.iter().find(|launcher| get(launcher.index).is_some()) else {
            return Ok(None);
        };
        let first = launcher.first.map_or(Ok(None), number)?.unwrap_or(0);
        let count = launcher.count.map_or(Ok(None), number)?;
        let found = number(launcher.index)?.unwrap_or(0);
        // Numbers of an array may have gaps, as where some of it runs again.
        let within = |index: usize| match (launcher.first, count) {
            (Some(_), Some(count)) => Some(index % count.max(1)),
            (_, count) => Some(index).filter(|index| count.is_none_or(|count| *index < count)),
        };
        let index = found.checked_sub(first).and_then(within);
        let wrong = || RankError::Launcher {
            name: launcher.index,
            expected: "an index below the number of processes",
            got: found.to_string(),
        };
        Ok(Some(Rank { index: index.ok_or_else(wrong)?, count, launcher: launcher.name }))
    }

    /// Returns the first of `units` that this rank works on, so that ranks begin apart.
    pub(crate) fn first_of(self, units: usize) -> usize {
        let count = self.count.unwrap_or(self.index + 1).max(1);
        // No product can overflow: neither is above the number of processes or units that fit in memory.
        (self.index as u128 * units as u128 / count as u128) as usize
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// Index, count and launcher.
    type Found = (usize, Option<usize>, &'static str);

    fn rank(variables: &[(&str, &str)]) -> Result<Option<Found>, String> {
        let get = |name: &str| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        };
        let found = Rank::from_variables(&get).map_err(|error| error.to_string())?;
        Ok(found.map(|rank| (rank.index, rank.count, rank.launcher)))
    }

    #[test]
    fn each_launcher_tells_the_rank() {
        assert_eq!(rank(&[]), Ok(None));
        assert_eq!(
            rank(&[("OMPI_COMM_WORLD_RANK", "3"), ("OMPI_COMM_WORLD_SIZE", "4"), ("SLURM_PROCID", "0")]),
            Ok(Some((3, Some(4), "Open MPI")))
        );
        assert_eq!(rank(&[("PMI_RANK", "1"), ("PMI_SIZE", "2")]), Ok(Some((1, Some(2), "MPI"))));
        let array = [
            ("SLURM_ARRAY_TASK_ID", "7"),
            ("SLURM_ARRAY_TASK_MIN", "5"),
            ("SLURM_ARRAY_TASK_COUNT", "4"),
            ("SLURM_PROCID", "0"),
            ("SLURM_NTASKS", "1"),
        ];
        assert_eq!(rank(&array), Ok(Some((2, Some(4), "Slurm array"))));
        let gaps = [("SLURM_ARRAY_TASK_ID", "9"), array[1], ("SLURM_ARRAY_TASK_COUNT", "2")];
        assert_eq!(rank(&gaps), Ok(Some((0, Some(2), "Slurm array"))));
        assert_eq!(rank(&array[3..]), Ok(Some((0, Some(1), "Slurm"))));
        assert_eq!(rank(&[("RANK", "0"), ("WORLD_SIZE", "8")]), Ok(Some((0, Some(8), "torchrun"))));
        assert_eq!(rank(&[("JOB_COMPLETION_INDEX", "5")]), Ok(Some((5, None, "Kubernetes"))));
    }

    #[test]
    fn processes_work_in_step_where_mpi_connects_several() {
        let in_step = |variables: &[(&str, &str)]| {
            let get = |name: &str| {
                variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
            };
            Rank::in_step_by(&get).map(|rank| rank.map(|rank| (rank.index, rank.count)))
        };
        assert_eq!(in_step(&[("PMI_RANK", "1"), ("PMI_SIZE", "2")]).unwrap(), Some((1, Some(2))));
        assert_eq!(in_step(&[("PMI_RANK", "0"), ("PMI_SIZE", "1")]).unwrap(), None);
        // The script of sbatch, a step without MPI, and one with it.
        let script = [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "4")];
        assert_eq!(in_step(&script).unwrap(), None);
        let step = [script[0], script[1], ("SLURM_STEP_NUM_TASKS", "4")];
        let said = in_step(&step).unwrap_err().to_string();
        assert!(said.contains("SLURM_PROCID: expected several processes that MPI connects"), "{said}");
        let connected = [step[0], step[1], step[2], ("PMIX_RANK", "0")];
        assert_eq!(in_step(&connected).unwrap(), Some((0, Some(4))));
        // Tasks of an array are runs of their own; processes of torchrun would write the same one.
        assert_eq!(in_step(&[("SLURM_ARRAY_TASK_ID", "1"), ("SLURM_ARRAY_TASK_COUNT", "4")]).unwrap(), None);
        assert!(in_step(&[("RANK", "0"), ("WORLD_SIZE", "2")]).is_err());
    }

    #[test]
    fn a_variable_that_is_no_rank_is_refused() {
        let said = rank(&[("RANK", "x"), ("WORLD_SIZE", "2")]).unwrap_err();
        assert!(
            said.starts_with("environment variable RANK: expected a number from 0, got \"x\"; fix: "),
            "{said}"
        );
        let said = rank(&[("RANK", "2"), ("WORLD_SIZE", "2")]).unwrap_err();
        assert!(said.contains("expected an index below the number of processes, got \"2\""), "{said}");
        let said = rank(&[("SLURM_ARRAY_TASK_ID", "1"), ("SLURM_ARRAY_TASK_MIN", "5")]).unwrap_err();
        assert!(said.contains("expected an index below"), "{said}");
    }

    #[test]
    fn ranks_begin_apart() {
        let first = |index, count| Rank { index, count, launcher: "" }.first_of(10);
        assert_eq!([0, 1, 2, 3].map(|index| first(index, Some(4))), [0, 2, 5, 7]);
        assert_eq!(first(3, None), 7);
        assert_eq!(Rank { index: 0, count: Some(0), launcher: "" }.first_of(0), 0);
    }
}
