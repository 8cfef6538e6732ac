//! Engines that start the workers of a job: what each is given.
//!
//! Every engine starts as many processes as there are workers. The first runs the command that was given, which writes the
//! output and takes part in the work; the others run `mantissa worker`. What happens to a process that dies is the
//! engine's: Ray and Kubernetes start it again, Slurm does after the loss of a node, MPI ends the others too. The same
//! script goes on from what is finished.

use std::path::{Path, PathBuf};

use mantissa_jobs::escape::quoted;

/// Parts of an engine's script.
#[derive(Clone)]
pub struct Launch {
    /// Words that start this program.
    pub program: Vec<String>,
    /// Number of processes.
    pub workers: usize,
    /// Folder that relative paths start from.
    pub directory: PathBuf,
    /// Folder of the job.
    pub job: PathBuf,
    /// Arguments of the command that writes the output.
    pub finish: Vec<String>,
}

/// Engine that starts workers.
#[derive(Clone, Copy)]
pub struct Engine {
    /// Name on the command line.
    pub name: &'static str,
    /// Makes the script.
    pub script: fn(&Launch) -> String,
    /// Program, with its first arguments, that takes the script on its standard input.
    pub submit: &'static [&'static str],
}

/// Engines.
///
/// Sources: Slurm, `sbatch(1)`, "--array", "--requeue"; MPI 5.0, section 11.5, "Portable MPI Process Startup" (colons);
/// Kubernetes, "Indexed Job for Parallel Processing with Static Work Assignment".
const ENGINES: [Engine; 4] = [
    Engine { name: "slurm", script: slurm, submit: &["sbatch"] },
    Engine { name: "mpi", script: mpi, submit: &["sh"] },
    Engine { name: "ray", script: ray, submit: &["sh"] },
    Engine { name: "k8s", script: kubernetes, submit: &["kubectl", "create", "-f", "-"] },
];

/// Finds an engine by its name.
///
/// # Errors
/// The names that there are.
pub fn parse(text: &str) -> Result<&'static Engine, String> {
    let names = ENGINES.map(|engine| engine.name);
    let found = ENGINES.iter().find(|engine| engine.name == text);
    let wrong =
        || format!("expected {}, got {text}; --for names an engine that serves models", names.join(", "));
    found.ok_or_else(wrong)
}

impl Launch {
    /// Line of a shell that writes the output.
    fn finishing(&self) -> String {
        line(self.program.iter().chain(&self.finish))
    }

    /// Line of a shell that works on the job.
    fn working(&self) -> String {
        format!("{} worker {}", line(&self.program), quoted(&self.job))
    }
}

/// Joins words to a line of a shell.
fn line<'a>(words: impl IntoIterator<Item = &'a String>) -> String {
    words.into_iter().map(|word| quoted(Path::new(word))).collect::<Vec<_>>().join(" ")
}

fn slurm(launch: &Launch) -> String {
    format!(
        "#!/bin/sh
#SBATCH --job-name=mantissa
#SBATCH --array=0-{last}
#SBATCH --requeue
#SBATCH --chdir={directory}
if [ \"$SLURM_ARRAY_TASK_ID\" -eq 0 ]; then
  exec {finish}
fi
exec {work}
",
        last = launch.workers - 1,
        directory = quoted(&launch.directory),
        finish = launch.finishing(),
        work = launch.working(),
    )
}

fn mpi(launch: &Launch) -> String {
    format!(
        "#!/bin/sh
cd {} || exit
exec mpiexec -n 1 {} : -n {} {}
",
        quoted(&launch.directory),
        launch.finishing(),
        launch.workers - 1,
        launch.working(),
    )
}

fn ray(launch: &Launch) -> String {
    format!(
        "#!/bin/sh
cd {} || exit
exec python3 -m mantissa.ray --workers {} {} -- {}
",
        quoted(&launch.directory),
        launch.workers,
        quoted(&launch.job),
        launch.finishing(),
    )
}

/// Makes an indexed Job. The image and the claim of the shared volume, which has all files of the job, are names to adapt;
/// strings are those of JSON, which YAML reads.
fn kubernetes(launch: &Launch) -> String {
    let inside = Launch { program: vec!["mantissa".to_owned()], ..launch.clone() };
    let script = format!(
        "if [ \"$JOB_COMPLETION_INDEX\" -eq 0 ]; then exec {}; else exec {}; fi",
        inside.finishing(),
        inside.working()
    );
    let text = |text: &str| serde_json::Value::from(text).to_string();
    let directory = launch.directory.display().to_string();
    format!(
        "apiVersion: batch/v1
kind: Job
metadata:
  generateName: mantissa-
spec:
  completionMode: Indexed
  completions: {workers}
  parallelism: {workers}
  backoffLimitPerIndex: 100
  podFailurePolicy:
    rules:
      - action: FailJob
        onExitCodes: {{containerName: worker, operator: In, values: [1, 2]}}
  template:
    spec:
      restartPolicy: Never
      containers:
        - name: worker
          image: mantissa:{version}
          workingDir: {directory}
          command: [\"sh\", \"-c\", {line}]
          env:
            - name: WORLD_SIZE
              value: \"{workers}\"
          volumeMounts:
            - name: shared
              mountPath: {directory}
      volumes:
        - name: shared
          persistentVolumeClaim:
            claimName: mantissa
",
        workers = launch.workers,
        version = env!("CARGO_PKG_VERSION"),
        directory = text(&directory),
        line = text(&script),
    )
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn script(engine: &str) -> String {
        let words = ["quantize", "a model", "--recipe", "int4", "--out", "o", "--job", "/w/o.job"];
        let launch = Launch {
            program: vec!["/opt/mantissa".to_owned()],
            workers: 4,
            directory: "/w/my folder".into(),
            job: "/w/o.job".into(),
            finish: words.map(str::to_owned).to_vec(),
        };
        (parse(engine).unwrap().script)(&launch)
    }

    const FINISH: &str = "/opt/mantissa quantize 'a model' --recipe int4 --out o --job /w/o.job";

    #[test]
    fn each_engine_starts_one_writer_and_the_others() {
        let slurm = script("slurm");
        assert!(
            slurm.contains("#SBATCH --array=0-3\n") && slurm.contains("--chdir='/w/my folder'\n"),
            "{slurm}"
        );
        assert!(slurm.contains(&format!("  exec {FINISH}\n")), "{slurm}");
        assert!(slurm.ends_with("\nexec /opt/mantissa worker /w/o.job\n"), "{slurm}");
        let mpi = script("mpi");
        assert!(
            mpi.contains(&format!("exec mpiexec -n 1 {FINISH} : -n 3 /opt/mantissa worker /w/o.job\n")),
            "{mpi}"
        );
        let ray = script("ray");
        assert!(ray.contains(&format!("mantissa.ray --workers 4 /w/o.job -- {FINISH}\n")), "{ray}");
        let kubernetes = script("k8s");
        assert!(
            kubernetes.contains("completions: 4\n") && kubernetes.contains("workingDir: \"/w/my folder\"\n"),
            "{kubernetes}"
        );
        assert!(kubernetes.contains("exec mantissa quantize 'a model'"), "{kubernetes}");
        assert!(parse("pbs").err().unwrap().contains("slurm, mpi, ray, k8s"));
    }
}
